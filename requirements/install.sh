#!/usr/bin/env bash
# Make a virtual environment that holds exactly the locked packages and this checkout, editable.
#
#   requirements/install.sh [cpu|cuda] [--venv DIR] [--with LOCK]... [--python PATH]
#
# LOCK is dev, sandboxes (docker, e2b, desktop), osworld, swebench or smollm2; several may be given.
#
# Does nothing when the environment already matches the lock files (a stamp keeps their hash).
# System packages are installed with apt-get when that is possible, else the command to run is printed.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv=$root/.venv python="" locks=(cpu)
while (($#)); do
  case $1 in
    cpu | cuda) locks[0]=$1 ;;
    --venv) venv=$2; shift ;;
    --with) locks+=("$2"); shift ;;
    --python) python=$2; shift ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "install.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
  shift
done
for lock in "${locks[@]}"; do
  [[ -f $root/requirements/$lock.lock ]] || { echo "install.sh: no lock file requirements/$lock.lock" >&2; exit 2; }
done

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }
files() { for lock in "${locks[@]}"; do echo "$root/requirements/$lock.lock"; done; }

usable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
find_python() {
  for candidate in ${python:-python3.11 python3 python3.12 python3.13}; do
    if usable "$candidate"; then command -v "$candidate"; return; fi
  done
  echo "install.sh: Python 3.11, 3.12 or 3.13 is needed; install it or pass --python PATH" >&2
  return 2
}

wants_dev() { [[ " ${locks[*]} " == *" dev "* ]]; }

# Prints the Debian packages that are missing: one line of names, empty when there are none.
missing_packages() {
  local need=()
  command -v bwrap >/dev/null || need+=(bubblewrap)
  command -v cc >/dev/null || need+=(gcc libc6-dev)
  "$1" -c 'import ensurepip, venv' 2>/dev/null || need+=(python3-venv)
  "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || need+=(python3-dev)
  "$1" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || need+=(libnuma1)
  "$1" -c 'import ctypes; ctypes.CDLL("libstdc++.so.6")' 2>/dev/null || need+=(libstdc++6)
  if wants_dev && [[ $(id -u) == 0 ]]; then  # the tests start a docker daemon of their own, as only root can
    command -v dockerd >/dev/null || need+=(docker.io)
    command -v runc >/dev/null || need+=(runc)
    command -v iptables >/dev/null || need+=(iptables)
  fi
  if wants_dev; then  # the tests make repositories, which are worked on in sandboxes
    command -v git >/dev/null || need+=(git)
  fi
  if wants_dev; then  # the tests put desktops into sandboxes
    command -v Xvfb >/dev/null || need+=(xvfb)
    command -v openbox >/dev/null || need+=(openbox)
    command -v dbus-daemon >/dev/null || need+=(dbus)
    command -v mousepad >/dev/null || need+=(mousepad)
    [[ -e /usr/libexec/at-spi-bus-launcher ]] || need+=(at-spi2-core)
    "$1" -c 'import ctypes; ctypes.CDLL("libnss_wrapper.so")' 2>/dev/null || need+=(libnss-wrapper)
    [[ -d /usr/share/fonts/truetype/dejavu ]] || need+=(fonts-dejavu-core)
    # what OSWorld's tasks in a terminal use; `make osworld-programs` installs those with windows of their own
    command -v gnome-terminal >/dev/null || need+=(gnome-terminal)
    command -v gsettings >/dev/null || need+=(libglib2.0-bin)
    command -v bc >/dev/null || need+=(bc)
    [[ -e /usr/share/glib-2.0/schemas/org.gnome.shell.gschema.xml ]] || need+=(gnome-shell-common)
  fi
  echo "${need[*]}"
}

system_packages() {
  local need; need=$(missing_packages "$1")
  [[ -z $need ]] && return
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    say "system packages: $need"
    apt-get update -qq >"$log" 2>&1 || true  # an unreachable third-party source must not stop us
    # shellcheck disable=SC2086 # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $need >>"$log" 2>&1 ||
      { tail -n 20 "$log" >&2; return 1; }
  else
    echo "install.sh: these system packages are missing; install them, then run this again:" >&2
    echo "  sudo apt-get install -y $need" >&2
    return 2
  fi
}

# pip's chatter goes to the log; one line for every 25 packages tells that it moves.
pip_install() {
  local total; total=$(cat $(files) | grep -c '==')
  "$venv/bin/python" -m pip install --no-input --no-deps --no-compile --progress-bar off \
    --disable-pip-version-check --ignore-requires-python "$@" 2>&1 | tee "$log" |
    awk -v total="$total" '/^Collecting/ && ++n % 25 == 0 { printf "         %d of %d: %s\n", n, total, $2; fflush() }
                           /^Installing collected/ { print "         unpacking"; fflush() }'
  return "${PIPESTATUS[0]}"
}

locked_packages() {
  local requirements=(); for file in $(files); do requirements+=(-r "$file"); done
  pip_install "${requirements[@]}" && return
  if grep -q 'No matching distribution found for torch==.*+cpu' "$log"; then
    say "the package index has no CPU build of torch: asking PyTorch's own"
    pip_install "${requirements[@]}" --extra-index-url https://download.pytorch.org/whl/cpu && return
  fi
  grep -E '^ERROR|error:' "$log" >&2 || tail -n 20 "$log" >&2
  echo "install.sh: pip failed; all it said is in $log" >&2
  return 1
}

# Where PYTHONDONTWRITEBYTECODE is set, as in most containers, every process would else compile what it imports:
# 52 s instead of 16 for the training process.
# Importing compiles what a run uses, a quarter of all that pip unpacked.
compile() {
  PYTHONDONTWRITEBYTECODE="" "$venv/bin/python" - 2>"$log" <<'PY'
import importlib

for name in (
    "torch.utils.tensorboard", "vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker", "ray", "math_verify",
    "rz_agent.recipes.train", "rz_agent.learner.learner", "rz_agent.envs.python_math",
):
    try:
        importlib.import_module(name)
    except Exception as error:  # `rz-agent doctor` is who judges what works
        print(f"         {name} does not import: {error}")
PY
}

log=$(mktemp "${TMPDIR:-/tmp}/rz-agent-install.XXXXXX")
interpreter=$(find_python)

# One stamp for each prefix of the lock files, so that a larger installation satisfies a smaller request.
stamps=()
for ((count = 1; count <= ${#locks[@]}; count++)); do
  hash=$({ cat $(files | head -n "$count") "$root/pyproject.toml" "$0"; echo "$root" "$interpreter"; } | sha256sum)
  stamps+=("$venv/rz-agent-${hash:0:16}")
done
if [[ -e ${stamps[-1]} && -z $(missing_packages "$interpreter") ]]; then
  rm -f "$log"; exit 0
fi

say "$("$interpreter" --version) at $interpreter"
system_packages "$interpreter"
[[ -x $venv/bin/python ]] || { say "virtual environment $venv"; "$interpreter" -m venv "$venv"; }
say "locked packages: ${locks[*]} (about 1.3 GB to fetch, 3.5 GB on disk)"
locked_packages
say "this checkout, editable"
"$venv/bin/python" -m pip install --no-input --no-deps --no-build-isolation --disable-pip-version-check -q -e "$root" \
  >"$log" 2>&1 || { tail -n 20 "$log" >&2; exit 1; }
say "bytecode of what a run imports"
compile
rm -f "$venv"/rz-agent-* "$log"; touch "${stamps[@]}"
say "installed in $venv"
