"""The app behind `homing dashboard`: a read-only web page that shows all runs. Needs the extra `web`, but not torch.

    section_feed   the content, in sections that are replaced or extended; written by threads, read by streams
    access_check   access control: host, origin, method, token; and the headers of every response
    dashboard_app  the routes: the page, its files, and the feeds as JSON and as server-sent events

    page.html, page.css   the page, with the shared design of `homing.page_assets`
    page.js               what is shown: the table, one run or a comparison; the stream of events
    runs_table.js         the table of all runs; figures.js: how numbers, states and commands are shown
    charts.js             one chart with its axes, smoothing and table; compare.js and one_run.js: the pages with charts
    uplot.js, uplot.css   uPlot 1.6.32, unchanged, with its license next to them

Only `homing.cli` imports this package. The package itself does not access the home folder, stores or providers: all
data arrives as feeds.
"""
