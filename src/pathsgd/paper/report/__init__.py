"""A study as one page that needs no network: claims, figures, tables, and where the numbers come from."""

from pathsgd.paper.report.page import write_report as write_report
