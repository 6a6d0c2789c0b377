"""The framework-free half of the adapters: the life of a session, where steps end, how calls run under a policy or once more.

What a framework adds is a few functions that a class here leaves open, or a `Protocol` asks for. Nothing here imports a framework;
adapters import this, and nothing below the adapters does.
"""
