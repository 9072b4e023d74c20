"""Download image data sets and verify that they are complete."""
