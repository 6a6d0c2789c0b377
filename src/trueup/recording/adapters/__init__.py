"""One folder per framework, the only code that imports it: each turns what the framework executes into calls of a `Recorder`.

An adapter is imported when the user already imported or named its framework. Nothing but an adapter, `simdev` and `trueup_compat`
may import a framework. What is the same in all of them is in `engine`; which there are and what each can do, `registry` says.
"""
