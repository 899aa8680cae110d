# --- AWS: the system's own timer, and the persistent volume (src/homing/cloud/providers/aws/create_request.py) ---
# SETTINGS

# The operating system runs this timer, whatever happens to our programs; an instance that shuts down is terminated. It
# uses the wall clock: OFFSET shows later whether that was adjusted. $1: seconds.
arm() {
  local minutes=$(($1 < 60 ? 1 : $1 / 60))
  shutdown -h "+$minutes" "homing: the limit" || return
  say "the system shuts down in $minutes min at the latest"
  now
  ARMED=$((NOW + 60 * minutes)) OFFSET=$(($(date +%s) - NOW))
}

# Limits may change during training, and only the first start uses the wall clock: the agent and the dead-man record the
# limits and the billed time by the boot clock, and the timer follows them. If they die, it stays unchanged.
follow_limits() {
  trap '' HUP INT TERM
  local left moved
  while sleep "$FOLLOW_S"; do
    left=$(python3 -I -c '
import json, sys
from decimal import Decimal
work = sys.argv[1]
sys.path.insert(0, work + "/agent.zip")
from homing.wire.control_files import boot_clock_s
from homing.wire.guard_timing import PROVIDER, allowed_s, reserve_s
told = json.load(open(work + "/boot.json"))
try:
    told.update({k: v for k, v in json.load(open(work + "/run/limits.json")).items() if v is not None})
except OSError:
    pass
spend = told["spend_limit_usd"] and Decimal(told["spend_limit_usd"])
allowed = allowed_s(Decimal(told["rate_usd_per_hour"]), spend, Decimal(told["spent_before_usd"]), told["time_limit_s"])
before, began = map(float, open(work + "/clock").read().split(" ")[:2])
print(int(allowed - reserve_s(PROVIDER, allowed, told["stop_grace_s"]) - before - boot_clock_s() + began))
' "$WORK" 2>/dev/null) || continue
    now
    moved=$(($(date +%s) - NOW - OFFSET))
    # Too late, and it can be set earlier (the minimum is a minute); too early by more than the rounding; or it moved.
    if [ $((ARMED - NOW - left)) -gt 5 ] && [ $((ARMED - NOW)) -gt 65 ] || [ $((NOW + left - ARMED)) -gt 90 ] \
      || [ "${moved#-}" -gt 5 ]; then
      arm "$left"
    fi
  done
}

if [ "$SYSTEM_TIMER_MAX_M" -gt 0 ]; then
  left=$((SYSTEM_TIMER_AT - $(date +%s)))
  arm $((left < 60 * SYSTEM_TIMER_MAX_M ? left : 60 * SYSTEM_TIMER_MAX_M)) \
    || say "the system's own timer could not be set; ours is"
  follow_limits &
fi

# Our disk is the EBS disk without partitions: the system runs from the other one.
find_disk() {
  local link
  for link in /dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_vol*; do
    case "$link" in *-part*) continue ;; esac
    [ -e "$link" ] && [ ! -e "$link-part1" ] && readlink -f "$link" && return
  done
  [ -b /dev/xvdf ] && echo /dev/xvdf  # types before Nitro
}

# Format it once: only if it is completely empty.
mount_volume() {
  local disk='' waited=0
  until disk=$(find_disk) && [ -n "$disk" ]; do
    [ "$waited" -ge "$VOLUME_WAIT_S" ] && stuck "the persistent volume did not appear within $VOLUME_WAIT_S s"
    sleep 2
    waited=$((waited + 2))
  done
  if ! blkid -p "$disk" >/dev/null 2>&1; then
    file -sbL "$disk" | grep -qx data || stuck "the volume $disk holds something that is no file system of ours"
    say "formatting the new volume $disk"
    mkfs.ext4 -q -L homing "$disk" || stuck "the volume $disk could not be formatted"
  fi
  mount "$disk" "$ROOT/cache" || stuck "the volume $disk could not be mounted"
  say "the persistent volume is mounted at $ROOT/cache"
}

if [ "$VOLUME_WAIT_S" -gt 0 ]; then mount_volume; fi

# Some images have python3 without the module that creates environments.
python3 -c 'import ensurepip, venv' 2>/dev/null || {
  say "installing python3-venv"
  { timeout 300 apt-get update -qq && timeout 300 apt-get install -y -qq python3-venv; } >>"$ROOT/boot.log" 2>&1
}
