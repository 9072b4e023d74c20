"""Text from Debian packages, which the test makes."""

import gzip
import io
import tarfile

import manual_pages
import pytest

ENGLISH = """.TH CAT 1
.SH NAME
cat \\- the concatenation of files
.\\" a comment
.SH DESCRIPTION
.PP
The
.BR cat (1)
command prints all of the files \\fIin order\\fR to the standard output,
and that is what it is for\\(em.
.nf
int code(void);
.fi
It\\(aqs \\(dqsimple\\(dq.
"""


def package(files):
    """A Debian package with these manual pages."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        for name, text in files.items():
            content = gzip.compress(text.encode())
            info = tarfile.TarInfo(f"./usr/share/man/man1/{name}.gz")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    found = b"!<arch>\n"
    for name, content in (("debian-binary", b"2.0"), ("data.tar.xz", buffer.getvalue())):
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        found += header + content + b"\n" * (len(content) % 2)
    return found


def test_markup_tables_and_code_are_removed():
    assert manual_pages.plain(ENGLISH) == (
        "NAME\ncat - the concatenation of files DESCRIPTION\nThe cat(1) command prints all of the "
        'files in order to the standard output, and that is what it is for-. It\'s "simple".'
    )


def test_a_corpus_has_long_pages_of_its_language_once():
    long = 3 * ENGLISH
    german = long.replace("The\n", "Das\n").replace("the ", "der ").replace(" and that is", " und")
    german = german.replace(" of ", " die ").replace(" is ", " ist ")
    files = {"cat.1": long, "alias.1": long, "short.1": ENGLISH[:60], "tac.1": german}
    found = manual_pages.corpus("en", [package(files)])
    assert list(found) in (["cat.1"], ["alias.1"])
    assert list(manual_pages.corpus("de", [package(files)])) == ["tac.1"]
    with pytest.raises(ValueError, match="not a Debian package"):
        manual_pages.members(b"<html>")


def test_a_page_belongs_to_the_same_part_in_all_languages():
    parts = [manual_pages.part_of(f"page-{i}.1") for i in range(1000)]
    assert 70 < parts.count("valid") < 130
    assert 70 < parts.count("test") < 130
