"""Tables of images: encodings, comments, and errors that name the file."""

import re

import pandas as pd
import pytest

from covon_avalanche.safe_text import csv_text
from covon_avalanche.streams.manifest import read_manifest, write_manifest

COLUMNS = "file,domain,label,split\n"
ROW = {"file": "NA/1, 2.png", "domain": "day", "label": "null", "split": "test"}
CLASSES = ["real", "fake"]  # not in alphabetical order


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_classes_and_rows_are_read(tmp_path, encoding):
    file = tmp_path / "a.csv"
    write_manifest(file, CLASSES, pd.DataFrame([ROW]))
    file.write_text(file.read_text(), encoding=encoding)
    classes, table = read_manifest(file)
    assert classes == CLASSES
    assert table.to_dict("records") == [ROW]


@pytest.mark.parametrize("comments", ["", "# mine\n", "# covon_avalanche manifest, version 1\n"])
def test_tables_without_classes(tmp_path, comments):
    (tmp_path / "a.csv").write_text(comments + COLUMNS + "#1/a.png,day,cat,test\n")
    classes, table = read_manifest(tmp_path / "a.csv")
    assert classes is None
    assert table["file"].tolist() == ["#1/a.png"]


def test_headings_and_empty_rows_of_spreadsheets(tmp_path):
    text = " File ,DOMAIN,Class,Split,Serial\n,,,,\na.png,day,cat,Test,7\n,,,,\n"
    (tmp_path / "a.csv").write_text(text)
    row = {"file": "a.png", "domain": "day", "label": "cat", "split": "test", "Serial": "7"}
    assert read_manifest(tmp_path / "a.csv")[1].to_dict("records") == [row]
    (tmp_path / "a.csv").write_text("File,path,class,Label,domain,split\n1,a.png,cat,2,day,test\n")
    found = read_manifest(tmp_path / "a.csv")[1]
    assert found[["file", "label"]].to_dict("records") == [{"file": "a.png", "label": "cat"}]
    (tmp_path / "a.csv").write_text(f"{text},day,cat,test,8\n")
    with pytest.raises(ValueError, match="row 4 after the header has no ' File '"):
        read_manifest(tmp_path / "a.csv")


def test_names_like_formulas_are_read_as_they_were(tmp_path):
    rows = [("-1/a.png", "=day", "+1", "train"), ("'b.png", "'day", "-1", "test")]
    wanted = pd.DataFrame(rows, columns=COLUMNS.strip().split(","))
    (tmp_path / "a.csv").write_text(csv_text(wanted))
    pd.testing.assert_frame_equal(read_manifest(tmp_path / "a.csv")[1], wanted, check_dtype=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a table in UTF-8: No columns"),
        ("file,domain,label\n", "lacks the columns ['split'], found ['file', 'domain', 'label']"),
        (COLUMNS + "x.png,day,cat,valid\n", "split must be train or test, got ['valid']"),
        (COLUMNS + "x.png,day,cat,test\ny.png,day,cat\n", "row 2 after the header has no 'split'"),
        ("#\npath,class,domain,split\n\nx.png,,day,test\n", ": row 1 after the header has no 'cla"),
        (COLUMNS + "y,1.png,day,cat,train\n", "rows with more than 4 values"),
        (COLUMNS + "x.png,day,cat,test\ny,1.png,day,cat,train\n", "Expected 4 fields in line 3"),
        ('# 2,,,\n"# classes: [""cat""]",,,\n' + COLUMNS, "lacks the columns"),  # saved by Excel
        ("# classes: 2\n" + COLUMNS, "expected # classes: ["),
        ("# classes: [\n" + COLUMNS, "expected # classes: ["),
    ],
)
def test_errors_name_the_file(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=f"a.csv.*{re.escape(message)}"):
        read_manifest(tmp_path / "a.csv")


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.csv is not a table in UTF-8: .*No such file"):
        read_manifest(tmp_path / "nowhere.csv")
    (tmp_path / "d.csv").write_text(f"{COLUMNS}é.png,day,cat,test\n", "latin-1")
    with pytest.raises(ValueError, match=r"d.csv is not a table in UTF-8: .* byte 0xe9"):
        read_manifest(tmp_path / "d.csv")
