"""The app behind `homing dashboard`: a read-only web page that shows all runs. Needs the extra `web`, but not torch.

    section_feed   the content, in sections that are replaced or extended; written by threads, read by streams
    access_check   access control: host, origin, method, token; and the headers of every response
    dashboard_app  the routes: the page, its files, and the feeds as JSON and as server-sent events

    page.html, page.css, page.js    the page; uplot.js and uplot.css are uPlot 1.6.32, with its license next to them

Only `homing.cli` imports this package. The package itself does not access the home folder, stores or providers: all
data arrives as feeds.
"""
