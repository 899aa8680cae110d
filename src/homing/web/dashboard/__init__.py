"""One page about all runs, for reading only: what `homing dashboard` starts. Needs the extra `web`, and no torch.

    feed    what there is to show, in sections that are replaced or grow; written by whoever looks, read by streams
    door    who may ask at all: host, origin, method, token; and the headers of every answer
    app     the routes: the page, its files, and the feeds as JSON and as server-sent events

    page.html, page.css, page.js    the page; uplot.js and uplot.css are uPlot 1.6.32, with its licence beside them

Only `homing.cli` imports it. It knows no home, no store and no provider: all of that reaches it as a feed.
"""
