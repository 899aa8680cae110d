"""Reports on a run, from stored data: what was trained, on which data, with what results, where, and at what cost.

    run directory, ledger, data manifest --read--> Report --make_sections--> sections --page--> Markdown or HTML
                                                      \\--draw--> one picture of the losses

A report measures nothing and queries no provider. Data that was not stored is reported as missing.
"""

from __future__ import annotations

from homing.report.collect import Subject, read_report
from homing.report.render_page import render_html, render_markdown
from homing.report.report_data import Report

__all__ = ["Report", "Subject", "read_report", "render_html", "render_markdown"]
