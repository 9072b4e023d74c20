"""The report of an experiment: one page, tables and figures. Nothing here imports torch."""

from covon_avalanche.report.section import Section, sections_of
from covon_avalanche.report.write import write_report

__all__ = ["Section", "sections_of", "write_report"]
