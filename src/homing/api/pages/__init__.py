"""The data behind the dashboard and reports, and what a local web server needs."""
