"""What worker processes of ``experiment/test_worker_pool.py`` run; they import it by name."""


def fail(kind):
    if kind == "exit":
        raise SystemExit(3)
    if kind == "local":

        class LocalError(Exception):
            pass

        raise LocalError("only here")
    raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no start byte")
