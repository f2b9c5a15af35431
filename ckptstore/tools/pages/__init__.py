"""Pages that are one file: their frame, their theme in dark and light, and the timeline of a save.

It may know nothing of this package but errors. `shell.html_page` makes a page of HTML, styles, scripts and a document;
`base.css` and `base.js` are what all pages share.
"""
