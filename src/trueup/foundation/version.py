"""The version of this package, as captures and reports name it."""

VERSION = "0.1.0"
