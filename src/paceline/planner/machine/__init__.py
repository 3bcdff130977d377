"""The machines to plan for, and what is known about this one: the measurements of
`paceline doctor`, and earlier runs."""
