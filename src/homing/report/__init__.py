"""One page about a run, from what is stored of it: what was trained, on what, how it went, where, for how much.

    run directory, ledger, data manifest --read--> Report --tell--> sections --page--> Markdown or HTML
                                                      \\--draw--> one picture of the losses

Nothing is measured here and nothing is asked of a provider; what was not stored is said to be absent.
"""

from __future__ import annotations

from homing.report.facts import Report
from homing.report.page import render_html, render_markdown
from homing.report.read import Subject, read_report

__all__ = ["Report", "Subject", "read_report", "render_html", "render_markdown"]
