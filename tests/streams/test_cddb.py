"""CDDB: labels by folder, tracks, evaluation on val."""

import pytest
from miniature import cddb, check_labels, open_stream, paint

from covon_avalanche.streams import CDDB


def test_cddb_finds_labels_at_any_depth_and_tests_on_val(tmp_path):
    codes = cddb(tmp_path)
    benchmark = open_stream(CDDB, tmp_path, track="easy", domains=list(codes))
    check_labels(benchmark, codes)
    assert [len(e.dataset) for e in benchmark.test_stream] == [6, 6, 6]
    assert benchmark.classes == ["real", "fake"]


def test_cddb_tracks_and_errors(tmp_path):
    cddb(tmp_path)
    with pytest.raises(ValueError, match=r"CDDB \(hard\) has the domains .* got \['cyclegan'\]"):
        CDDB(dataset_root=tmp_path, domains=["cyclegan"])
    with pytest.raises(ValueError, match="track must be one of"):
        CDDB(dataset_root=tmp_path, track="Hard")
    with pytest.raises(ValueError, match=r"no folder .*wild"):
        CDDB(dataset_root=tmp_path, domains=["wild"])
    paint(tmp_path / "gaugan" / "train" / "stray.png", 0)
    with pytest.raises(ValueError, match=r"stray.png is in no folder named 0_real or 1_fake"):
        CDDB(dataset_root=tmp_path, domains=["gaugan"])
