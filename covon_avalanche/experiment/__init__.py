"""Run, resume and report experiments."""
