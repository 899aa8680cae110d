# --- AWS: the system's own timer, and the persistent volume (src/homing/cloud/providers/aws_machine.py) ---
# SETTINGS

# Process 1 keeps this timer, whatever becomes of our programs; an instance that shuts down is terminated.
arm() {
  local minutes=$((($1 - $(date +%s)) / 60))
  minutes=$((minutes < 1 ? 1 : minutes > SYSTEM_TIMER_MAX_M ? SYSTEM_TIMER_MAX_M : minutes))
  shutdown -h "+$minutes" "homing: the limit" && say "the system shuts down in $minutes min at the latest"
}

# Limits may be changed while it trains: the agent writes them down, and the timer follows. Dead, it leaves the last one.
follow_limits() {
  trap '' HUP INT TERM
  local armed=$SYSTEM_TIMER_AT left now
  while sleep "$FOLLOW_S"; do
    left=$(python3 -I -c '
import json, sys, time
from decimal import Decimal
work = sys.argv[1]
sys.path.insert(0, work + "/agent.zip")
from homing.wire.limit import PROVIDER, allowed_s, reserve_s
told = json.load(open(work + "/boot.json"))
try:
    told.update({k: v for k, v in json.load(open(work + "/run/limits.json")).items() if v is not None})
except OSError:
    pass
spend = told["spend_limit_usd"] and Decimal(told["spend_limit_usd"])
allowed = allowed_s(Decimal(told["rate_usd_per_hour"]), spend, Decimal(told["spent_before_usd"]), told["time_limit_s"])
began = told["started_at"] + int(sys.argv[2])
print(int(began + allowed - reserve_s(PROVIDER, allowed, told["stop_grace_s"]) - time.time()))
' "$WORK" "$CLOCK_AHEAD_S" 2>/dev/null) || continue
    now=$(date +%s)
    if [ $((now + left - armed)) -gt 60 ] || [ $((armed - now - left)) -gt 60 ]; then
      armed=$((now + left))
      SYSTEM_TIMER_MAX_M=$((left / 60 + 1))
      arm "$armed"
    fi
  done
}

if [ "$SYSTEM_TIMER_MAX_M" -gt 0 ]; then
  arm "$SYSTEM_TIMER_AT" || say "the system's own timer could not be set; ours is"
  follow_limits &
fi

# Ours is the disk of EBS that has no partitions: the system runs from the other one.
find_disk() {
  local link
  for link in /dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_vol*; do
    case "$link" in *-part*) continue ;; esac
    [ -e "$link" ] && [ ! -e "$link-part1" ] && readlink -f "$link" && return
  done
  [ -b /dev/xvdf ] && echo /dev/xvdf  # types before Nitro
}

# Formatted once: only where nobody finds anything on it at all.
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

# Some images bring python3 without the part that makes environments.
python3 -c 'import ensurepip, venv' 2>/dev/null || {
  say "installing python3-venv"
  { timeout 300 apt-get update -qq && timeout 300 apt-get install -y -qq python3-venv; } >>"$ROOT/boot.log" 2>&1
}
