"""Where data sets are downloaded from."""

from covon_avalanche.datasets.catalogue import CATALOGUE


def test_the_catalogue_is_complete_where_it_can_be():
    domainnet = CATALOGUE["DomainNet"].files
    assert len(domainnet) == 18
    assert len({file.md5 for file in domainnet}) == 18
    assert all(file.size and len(file.md5) == 32 for file in domainnet)
    for dataset in CATALOGUE.values():
        assert dataset.files or "unpack it so that" in dataset.note
