"""Report what is in stores, as one document: gathered from their logs, shown as a page, written to a file or served."""
