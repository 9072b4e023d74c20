"""``covon``, and ``python -m covon_avalanche``."""

import signal


def main() -> None:
    """Entry point of the console script. Ctrl-C during the imports ends it without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # it may be ignored, in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from covon_avalanche import cli

    signal.signal(signal.SIGINT, handler)
    cli.app()


if __name__ == "__main__":
    main()
