"""How the launcher tells the ranks that go on which ones have ended: through the store by which
they met."""

#: Set by the ranks when the run can go on without one of them.
MEETING_KEY = "paceline/meeting"
#: Set by the launcher: JSON of rank → {"pid", "reason"} of those that have ended.
LOST_KEY = "paceline/lost"
