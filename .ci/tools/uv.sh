# Sourced by the scripts beside it, from the repository root: uv, and where torch's CPU build comes from.
venv=.venv
uv=$venv/tools/bin/uv
torch=()

# Prints whether a wheel folder holds a CPU build of torch for this interpreter.
local_torch() {
  local tag folder
  tag=$("$1" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  for folder in ${UV_FIND_LINKS//,/ }; do
    compgen -G "$folder/torch-*+cpu-$tag-*.whl" >/dev/null && return
  done
  return 1
}

# Sets `torch`, uv's arguments for a CPU build for the interpreter $1, and UV_FIND_LINKS.
find_torch() {
  # uv does not read pip's settings; its list is separated by commas, pip's by spaces.
  if [ -z "${UV_FIND_LINKS:-}" ] && [ -n "${PIP_FIND_LINKS:-}" ]; then
    UV_FIND_LINKS=$(printf '%s' "$PIP_FIND_LINKS" | tr -s ' ' ',')
  fi
  export UV_FIND_LINKS=${UV_FIND_LINKS:-}
  if local_torch "$1"; then say "torch from $UV_FIND_LINKS"; else torch=(--torch-backend cpu); say "torch from PyTorch's CPU wheel index"; fi
}

# Installs into the environment $1; the rest are further arguments of uv.
install_packages() {
  local target=$1
  shift
  find_torch "$target/bin/python"
  say "installing packages"
  "$uv" pip install --python "$target/bin/python" --link-mode "${UV_LINK_MODE:-hardlink}" \
    --excludes .ci/tools/excludes.txt "${torch[@]}" "$@"
}
