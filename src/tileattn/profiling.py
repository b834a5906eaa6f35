"""How fast a call is, as users import it; the code is in measure/profiling.py."""

from .measure.profiling import Profile, Profiles, machine_ceiling, profile, profile_all

__all__ = ["profile", "profile_all", "machine_ceiling", "Profile", "Profiles"]
