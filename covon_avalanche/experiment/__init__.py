"""Recipe to run to result to report."""
