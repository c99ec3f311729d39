"""Commands that need no device: search a plan, simulate one."""

COMMANDS = ()
