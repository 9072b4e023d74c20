"""English, German and French text: Debian's manual pages, downloaded as packages, not installed.

    python benchmarks/manual_pages.py FOLDER                   packages by ``apt-get download``
    python benchmarks/manual_pages.py FOLDER --packages DEBS   from a folder of ``.deb`` files

writes ``FOLDER/{en,de,fr}/{train,valid,test}.jsonl``, a page a line, as
``{"page": ..., "text": ...}``. Roff markup is removed; aliases, duplicates and pages that are not
translated are left out. A page belongs to the same part in all languages, by a hash of its name: a
tenth each for validation and test.

Licences: most pages are under the GPL, BSD or the Linux manual page licence
(https://spdx.org/licenses/Linux-man-pages-copyleft.html); ``usr/share/doc/PACKAGE/copyright`` in
each package has them. The text is for experiments on the machine that downloads it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from covon_avalanche.atomic_write import write_atomically

PACKAGES = {
    "en": {
        "manpages=6.03-2": "efa1ba4cd19ad7baeae959c9209a7eb7",
        "manpages-dev=6.03-2": "96f55cb5e26231d5567c89b692bced63",
    },
    "de": {
        "manpages-de=4.18.1-1": "37d2e7ee51f22952aecec3af93647ff5",
        "manpages-de-dev=4.18.1-1": "cb3d7c10977dd3c811065d89e0d91219",
    },
    "fr": {
        "manpages-fr=4.18.1-1": "ec29759cc0e4a44dc7719c1e32869d00",
        "manpages-fr-dev=4.18.1-1": "25f5a53208d92f0a69a89e349edfb306",
    },
}
"""Packages of Debian 12 with their versions, and how their SHA-256 begins."""
SHORTEST = 400  # characters; what is shorter is an alias or a stub
COMMON_WORDS = {
    "en": {"the", "of", "and", "to", "is", "in", "that"},
    "de": {"der", "die", "und", "das", "ist", "von", "wird"},
    "fr": {"le", "la", "les", "des", "est", "et", "une"},
}


def download(package: str, folder: Path) -> None:
    """Write ``NAME_VERSION_all.deb`` into a folder by the system's package client."""
    advice = f"put {file_name(package)} into a folder and pass it by --packages"
    if shutil.which("apt-get") is None:
        raise SystemExit(f"this system has no apt-get: {advice}")
    done = subprocess.run(
        ["apt-get", "download", package], cwd=folder, capture_output=True, text=True
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise SystemExit(f"apt-get download {package} failed ({reason}): {advice}")


def file_name(package: str) -> str:
    """The file of ``NAME=VERSION``."""
    return f"{package.replace('=', '_')}_all.deb"


def fetch(package: str, digest: str, folder: Path | None = None) -> bytes:
    """A package, from a folder or downloaded.

    :raises ValueError: if it is not the expected one.
    """
    with TemporaryDirectory() as downloads:
        if folder is None:
            download(package, Path(downloads))
        file = (folder or Path(downloads)) / file_name(package)
        if not file.is_file():
            raise SystemExit(f"{file} is missing")
        content = file.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if not found.startswith(digest):
        raise ValueError(f"{package} has SHA-256 {found}, which should begin with {digest}")
    return content


def members(package: bytes) -> dict[str, bytes]:
    """The files of a Debian package, which is an ``ar`` archive."""
    if not package.startswith(b"!<arch>\n"):
        raise ValueError("this is not a Debian package")
    found, position = {}, 8
    while position + 60 <= len(package):
        header = package[position : position + 60]
        name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
        found[name] = package[position + 60 : position + 60 + size]
        position += 60 + size + size % 2
    return found


def pages(package: bytes) -> Iterator[tuple[str, str]]:
    """Names such as ``printf.3`` and roff sources of a package's manual pages."""
    (data,) = [content for name, content in members(package).items() if name.startswith("data.")]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None and "/man/" in member.name and member.name.endswith(".gz"):
                yield (
                    Path(member.name).stem,
                    gzip.decompress(file.read()).decode("utf-8", "replace"),
                )


ESCAPES = [
    (r"\\(f\(..|f\[[^\]]*\]|f.|s[-+]?\d+|[&|^%/,:])", ""),  # fonts, sizes, spacing
    (r"\\(\(aq|\[aq\]|\[cq\]|\(cq)", "'"),
    (r"\\(\(dq|\[dq\]|\[lq\]|\[rq\]|\(lq|\(rq)", '"'),
    (r"\\(\(Fo|\[Fo\])", "«"),
    (r"\\(\(Fc|\[Fc\])", "»"),
    (r"\\(\(Bq|\[Bq\])", "„"),
    (r"\\(\(en|\(em|\[en\]|\[em\]|\(mi)", "-"),
    (r"\\(\(bu|\[bu\])", "*"),
    (r"\\(\(co|\[co\])", "(c)"),
    (r"\\(\[ti\]|\(ti)", "~"),
    (r"\\(\[ha\]|\(ha)", "^"),
    (r"\\[- 0~]", lambda match: "-" if match[0] == "\\-" else " "),
    (r"\\(e|\\)", r"\\"),
    (r"\\(\[[^\]]*\]|\(..|\*\[[^\]]*\]|\*\(..|.)", ""),  # whatever else
]
WITH_TEXT = {"B", "I", "BR", "BI", "IR", "IB", "RB", "RI", "SM", "SB", "SH", "SS"}
TABLE_OR_CODE = {"TS": "TE", "EX": "EE", "nf": "fi", "ig": "."}


def plain(roff: str) -> str:
    """The running text of a page: no macros, tables or code."""
    lines: list[str] = []
    until = None
    for raw in roff.splitlines():
        line = raw.split('\\"')[0].rstrip()
        macro, _, rest = line[1:].strip().partition(" ")
        is_macro = line.startswith((".", "'"))
        if until is not None:
            until = None if is_macro and macro == until else until
        elif is_macro and macro in TABLE_OR_CODE:
            until = TABLE_OR_CODE[macro]
        elif is_macro and macro in WITH_TEXT:
            words = re.findall(r'"([^"]*)"|(\S+)', rest)
            joint = "" if len(macro) == 2 and macro not in ("SM", "SB", "SH", "SS") else " "
            lines.append(joint.join(a or b for a, b in words))
            lines += ["\n"] if macro in ("SH", "SS") else []
        elif is_macro:
            lines += ["\n"] if macro in ("PP", "P", "LP", "TP", "IP") else []
        elif line:
            lines.append(line)
    text = " ".join(lines)
    for pattern, replacement in ESCAPES:
        text = re.sub(pattern, replacement, text)
    text = re.sub(r"[ \t]+", " ", html.unescape(text))
    return re.sub(r" ?\n[ \n]*", "\n", text).strip()


def language_of(text: str) -> str:
    """The language whose common words are most frequent."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    return max(COMMON_WORDS, key=lambda name: sum(word in COMMON_WORDS[name] for word in words))


def corpus(language: str, packages: list[bytes]) -> dict[str, str]:
    """Texts by name of the page: in this language, none twice."""
    found: dict[str, str] = {}
    seen = set()
    for package in packages:
        for name, roff in pages(package):
            text = plain(roff)
            if len(text) < SHORTEST or ".Dd " in roff or text in seen:
                continue
            if language_of(text) == language:
                seen.add(text)
                found[name] = text
    return dict(sorted(found.items()))


def part_of(page: str) -> str:
    """``train``, ``valid`` or ``test``."""
    digit = int(hashlib.sha256(page.encode()).hexdigest(), 16) % 10
    return {0: "valid", 1: "test"}.get(digit, "train")


def main() -> None:
    """Fetch the packages, convert and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--packages", type=Path, help="a folder of .deb files")
    given = parser.parse_args()
    folder = given.folder
    for language, packages in PACKAGES.items():
        contents = [fetch(name, digest, given.packages) for name, digest in packages.items()]
        texts = corpus(language, contents)
        for part in ("train", "valid", "test"):
            lines = [
                json.dumps({"page": page, "text": text}, ensure_ascii=False) + "\n"
                for page, text in texts.items()
                if part_of(page) == part
            ]
            write_atomically(folder / language / f"{part}.jsonl", "".join(lines))
            print(f"{language}/{part}: {len(lines)} pages, {sum(map(len, lines)):,} characters")


if __name__ == "__main__":
    main()
