"""The look of all pictures and report pages: one palette, one page template, captions in English and in Chinese."""
