"""What a person reads. A feature is one file (`overflow`, `audit`, `diff`, `triage`): its document, its text, its page.

Renderers take a finished ``Result`` (or a table of records, for ``trueup show``) and return text, a document or bytes; only
``saving`` writes files. No framework is imported here; the renderer that needs pyarrow, rich, jinja2 or bokeh imports it, so that
``trueup --help`` stays quick. Sentences come from `trueup.foundation.words`.
"""
