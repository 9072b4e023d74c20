"""Getting the image data sets onto a disk, and making sure that they are whole."""
