"""What a desktop of ours is given so that it is like the machine OSWorld's tasks were written for.

A task expects Ubuntu's desktop: Ctrl+Alt+T opens a terminal, there is a Desktop folder, `sudo` takes a
password, Chrome is called google-chrome. Nothing here knows a task.
"""

from __future__ import annotations

from collections.abc import Mapping

PASSWORD = "password"  # as on OSWorld's own machines; the stand-in for sudo asks for none
HOME, BOX = "/home/user", "/box"  # as tasks call the home, and as the sandbox does
PROGRAMS = ".local/bin"  # below the home, first on PATH
PATH = f"{BOX}/{PROGRAMS}:/usr/local/bin:/usr/bin:/bin"

# There is no other user to become: a command that only wants to write into the home works as it is.
_SUDO = """#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in
    -S) read -r password || true; shift ;;
    -u) shift 2 ;;
    --) shift; break ;;
    -*) shift ;;
    *) break ;;
  esac
done
exec "$@"
"""
# Its own sandbox cannot nest in ours. Tasks end it by `pkill chrome`, which has to end the browser as well.
_CHROME = """#!/bin/sh
chromium --no-sandbox --test-type --no-first-run --no-default-browser-check --password-store=basic \\
  --disable-gpu --force-renderer-accessibility --user-data-dir="$HOME/.config/google-chrome" "$@" &
trap 'kill $!' TERM
wait $!
"""
STAND_INS: Mapping[str, str] = {"sudo": _SUDO, "google-chrome": _CHROME}

# The window manager's own settings with one key more.
_TERMINAL_KEY = (
    '<keybind key="C-A-t"><action name="Execute"><command>gnome-terminal</command></action></keybind>'
)
ARRANGE = f"""
mkdir -p Desktop Documents Downloads Music Pictures Videos .config/openbox
sed 's|</keyboard>|{_TERMINAL_KEY}</keyboard>|' /etc/xdg/openbox/rc.xml > .config/openbox/rc.xml
openbox --reconfigure
"""
