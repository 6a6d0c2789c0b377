"""One folder per framework, the only code that imports it: each turns what the framework executes into calls of a `Recorder`.

An adapter is imported when the user already imported or named its framework. Nothing outside an adapter, `simdev` and `compat`
may import a framework.
"""
