"""The report of an experiment: one page, tables and figures. Nothing here imports torch."""

from covon_avalanche.experiment.reporting.section import Section, sections_of
from covon_avalanche.experiment.reporting.write import write_report

__all__ = ["Section", "sections_of", "write_report"]
