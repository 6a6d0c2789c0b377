"""Where the time of a training step goes: traces and tables of profilers read, sorted into the classes of the Ascend porting guide,
each with the sign that proves it and what to do. Imported by the doors alone."""

from trueup.migration.profile.judging import Profile, compare
from trueup.migration.profile.running import profile, profiled

__all__ = ["Profile", "compare", "profile", "profiled"]
