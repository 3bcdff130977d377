"""Check the mapping of columns of a source."""

from collections.abc import Collection, Mapping

from paceline.core.errors import ConfigError, did_you_mean


def check_columns(
    label: str,
    columns: Mapping[str, str],
    ignore_columns: Collection[str],
    expected: Collection[str],
) -> None:
    """Check ``columns`` and ``ignore_columns`` of a source.

    Args:
        label: the name of the source, for messages.
        columns: `{expected name: name in the data}`.
        expected: the expected names that there are.

    Raises:
        ConfigError: an expected name is unknown, or a column is mapped and ignored.
    """
    for name, column in columns.items():
        if name not in expected:
            raise ConfigError(
                f"`columns: {{{name}: {column}}}` of {label}: unknown column `{name}`",
                allowed="`{EXPECTED: YOURS}` with EXPECTED one of " + ", ".join(sorted(expected)),
                fix=did_you_mean(name, expected),
            )
        if column in ignore_columns:
            raise ConfigError(
                f"`{column}` of {label} is in both `columns` and `ignore_columns`",
                fix="remove it from one of them",
            )
