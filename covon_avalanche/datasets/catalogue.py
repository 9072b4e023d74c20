"""Where to download the image data sets, with sizes and checksums."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RemoteFile:
    """A file of a data set; a zip archive is unpacked.

    :param size: in bytes.
    :param md5: hexadecimal.
    """

    url: str
    size: int
    md5: str

    @property
    def name(self) -> str:
        """The file name, the last part of the address."""
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class DataSet:
    """A data set.

    :param folder: its folder below the root of all data.
    :param note: version and size, or how to download it by hand if there are no ``files``.
    """

    name: str
    folder: str
    note: str
    files: tuple[RemoteFile, ...] = ()


_DOMAINNET = "http://csr.bu.edu/ftp/visda/2019/multi-source/"
_DOMAINNET_FILES = {
    "groundtruth/clipart.zip": (1_270_909_081, "cd0d8f2d77a4e181449b78ed62bccf1e"),
    "infograph.zip": (4_338_659_804, "720380b86f9e6ab4805bb38b6bd135f8"),
    "groundtruth/painting.zip": (3_679_366_174, "1ae32cdb4f98fe7ab5eb0a351768abfd"),
    "quickdraw.zip": (459_920_701, "bdc1b6f09f277da1a263389efe0c7a66"),
    "real.zip": (6_062_039_589, "dcc47055e8935767784b7162e7c7cca6"),
    "sketch.zip": (2_633_992_926, "658d8009644040ff7ce30bb2e820850f"),
    "domainnet/txt/clipart_train.txt": (1_443_819, "b4349693a7f9c05c53955725c47ed6cb"),
    "domainnet/txt/clipart_test.txt": (628_917, "f5ddbcfd657a3acf9d0f7da10db22565"),
    "domainnet/txt/infograph_train.txt": (1_683_098, "379b50054f4ac2018dca4f89421b92d9"),
    "domainnet/txt/infograph_test.txt": (728_028, "779626b50869edffe8ea6941c3755c71"),
    "domainnet/txt/painting_train.txt": (2_241_901, "7db0e7ca73ad9982f6e1f7f3ef372c0a"),
    "domainnet/txt/painting_test.txt": (971_888, "232b35dc53f26d414686ae579e38d9b5"),
    "domainnet/txt/quickdraw_train.txt": (5_164_600, "b732ced3939ac8efdd8c0a889dca56cc"),
    "domainnet/txt/quickdraw_test.txt": (2_213_400, "c1a828fdfe216fb109f1c0083a252c6f"),
    "domainnet/txt/real_train.txt": (4_440_944, "8ebf02c2075fadd564705f0dc7cd6291"),
    "domainnet/txt/real_test.txt": (1_911_327, "6098816791c3ebed543c71ffa11b9054"),
    "domainnet/txt/sketch_train.txt": (1_960_222, "1233bd18aa9a8a200bf4cecf1c34ef3e"),
    "domainnet/txt/sketch_test.txt": (850_581, "d8a222e4672cfd585298aa14d02ea441"),
}

CATALOGUE = {
    dataset.name: dataset
    for dataset in (
        DataSet(
            "DomainNet",
            "domainnet",
            "the cleaned version, 18.4 GB",
            tuple(
                RemoteFile(_DOMAINNET + path, size, md5)
                for path, (size, md5) in _DOMAINNET_FILES.items()
            ),
        ),
        DataSet(
            "CORe50",
            "core50",
            "images of 128 x 128 pixels, 5.9 GB",
            (
                RemoteFile(
                    "http://bias.csr.unibo.it/maltoni/download/core50/core50_128x128.zip",
                    5_892_103_007,
                    "745f3373fed08d69343f1058ee559e13",
                ),
            ),
        ),
        DataSet(
            "CDDB",
            "CDDB",
            "only on Google Drive, file 1NgB8ytBMFBFwyXJQvdVT_yek1EaaEHrg (see "
            "github.com/Coral79/CDDB), about 10 GB: unpack it so that CDDB/gaugan/train exists",
        ),
        DataSet(
            "PACS",
            "PACS",
            "only on Google Drive (see github.com/MachineLearning2020/Homework3-PACS for a copy): "
            "unpack it so that PACS/photo/dog exists",
        ),
        DataSet(
            "OfficeHome",
            "OfficeHome",
            "only on Google Drive (see hemanthdv.github.io/officehome-dataset), about 1 GB: unpack "
            "it so that OfficeHome/Art/Alarm_Clock exists",
        ),
        DataSet(
            "ImageNetR",
            "imagenet-r",
            "a tar archive of about 2 GB, people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar (see "
            "github.com/hendrycks/imagenet-r): unpack it so that imagenet-r/n01443537 exists",
        ),
    )
}
