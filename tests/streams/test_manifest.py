"""Tables of images: encodings, comments, versions, and errors that name the line."""

import csv
import io
import re

import pytest

from covon_avalanche.streams.manifest import header, read_table

COLUMNS = "file,domain,label,split\n"
ROW = "a.png,day,cat,test\n"
CLASSES = ["real", "fake"]  # not in alphabetical order


def excel(text):
    """As a spreadsheet saves it: rows of the same length, cells quoted if necessary."""
    rows = list(csv.reader(text.splitlines()))
    width = max(map(len, rows))
    out = io.StringIO(newline="")
    csv.writer(out).writerows([*row, *[""] * (width - len(row))] for row in rows)
    return out.getvalue()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("saved", [lambda text: text, excel], ids=["as written", "by Excel"])
def test_classes_and_rows_are_read(tmp_path, encoding, saved):
    file = tmp_path / "a.csv"
    file.write_text(saved(header(CLASSES) + COLUMNS + ROW), encoding=encoding)
    classes, rows = read_table(file)
    assert classes == CLASSES
    assert rows == [{"file": "a.png", "domain": "day", "label": "cat", "split": "test"}]


def test_tables_without_classes(tmp_path):
    file = tmp_path / "a.csv"
    for comments in ("", "# mine\n", "# covon_avalanche manifest, version 1\n"):
        file.write_text(comments + COLUMNS + "#1/a.png,day,cat,test\n")
        classes, rows = read_table(file)
        assert classes is None
        assert rows[0]["file"] == "#1/a.png"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,domain,label\n", "lacks the columns ['split']"),
        (COLUMNS + "x.png,day,cat,valid\n", "line 2: split must be train or test, got 'valid'"),
        ("# comment\n" + COLUMNS + "x.png,day,cat,valid\n", "line 3: split must be"),
        (COLUMNS + ROW + "y.png,day,cat\n", "line 3: expected 4 values: file, domain, "),
        (COLUMNS + ROW + "y,1.png,day,cat,train\n", "line 3: expected 4 values: file, domain, "),
        (header([]).replace("2", "3") + COLUMNS, "is a manifest of version 3, which is newer than"),
        (header([]).splitlines()[0] + f"\n{COLUMNS}", "line 2: expected # classes: ["),
    ],
)
def test_errors_name_the_line(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=f"a.csv.*{re.escape(message)}"):
        read_table(tmp_path / "a.csv")


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.csv cannot be read: No such file"):
        read_table(tmp_path / "nowhere.csv")
    (tmp_path / "d.csv").write_text(f"{COLUMNS}é.png,day,cat,test\n", "latin-1")
    with pytest.raises(ValueError, match=r"d.csv is not text in UTF-8: .* byte 0xe9"):
        read_table(tmp_path / "d.csv")
