"""Text from Debian packages, which the test makes."""

import gzip
import hashlib
import io
import shutil
import subprocess
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


def test_packages_come_by_the_systems_client_or_from_a_folder(tmp_path, monkeypatch):
    content = package({"cat.1": ENGLISH})
    digest = hashlib.sha256(content).hexdigest()

    def apt(command, cwd, **options):
        assert command == ["apt-get", "download", "some-man=1.2-3"]
        (cwd / "some-man_1.2-3_all.deb").write_bytes(content)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", apt)
    assert manual_pages.fetch("some-man=1.2-3", digest[:32]) == content
    monkeypatch.setattr(subprocess, "run", None)  # not called
    with pytest.raises(SystemExit, match=r"some-man_1\.2-3_all\.deb is missing"):
        manual_pages.fetch("some-man=1.2-3", digest[:32], tmp_path)
    (tmp_path / "some-man_1.2-3_all.deb").write_bytes(content)
    assert manual_pages.fetch("some-man=1.2-3", digest[:32], tmp_path) == content
    with pytest.raises(ValueError, match="has SHA-256"):
        manual_pages.fetch("some-man=1.2-3", "0" * 32, tmp_path)


def test_without_the_client_or_the_version_one_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"no apt-get: put man_1_all\.deb into a folder"):
        manual_pages.fetch("man=1", "")
    failed = subprocess.CompletedProcess([], 100, "", "Reading...\nE: Version '1' was not found\n")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(SystemExit, match=r"failed \(E: Version '1' was not found\): put man_1_all"):
        manual_pages.fetch("man=1", "")
