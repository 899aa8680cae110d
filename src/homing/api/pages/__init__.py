"""Data for the dashboard and for reports, the dashboard's server, and the masking of secrets."""
