#!/bin/bash
# homing: the first command of a rented machine (src/homing/cloud/machine_setup/startup_script.py)
# SETTINGS
export HOMING_MARK=$MARK HOME="${HOME:-/root}" PATH="${PATH:-/usr/bin:/bin}:/usr/local/sbin:/usr/sbin:/sbin"
WORK=$ROOT/work SHM=/dev/shm/homing${ROOT//\//-}
umask 077

now() { local up; read -r up _ </proc/uptime && NOW=${up%%.*}; }

# Writes to the log, which is copied to stdout, or to stdout if that fails.
say() { { echo "$(date -u +%FT%TZ) homing: $*" >>"$ROOT/boot.log"; } 2>/dev/null || echo "homing: $*"; }

# Tries forever: while this runs, billing has not ended. Does not rely on the disk, which may be full.
end_billing() {
  local pause=5 said
  trap '' HUP INT TERM PIPE
  { : >"$ROOT/ended"; } 2>/dev/null
  say "ending billing: $1"
  while :; do
    if said=$(timeout -k 5 90 bash -c "$END" 2>&1); then say "the request to end billing was accepted. $said"
    else say "STILL BILLING: the command to end billing failed with exit code $?. $said"; fi
    sleep "$pause"
    pause=$((pause < 40 ? pause * 2 : 60))
  done
}

dead_man_lives() {
  [ -e "$WORK/$DEAD_MAN_LOCK" ] || return 1
  flock -n -E 9 "$WORK/$DEAD_MAN_LOCK" true
  [ $? = 9 ]
}

# $1: the time when a dead-man was last seen
timer() {
  local seen_at=$1
  trap '' HUP INT TERM PIPE
  { echo -900 >/proc/$BASHPID/oom_score_adj; } 2>/dev/null
  while :; do
    sleep "$LOOK_S"
    now
    if dead_man_lives; then seen_at=$NOW
    elif [ "$NOW" -ge "$END_AT" ] && [ $((NOW - seen_at)) -ge "$GRACE_S" ]; then
      end_billing "no dead-man process is running $END_WITHIN_S s after the machine started"
    fi
  done
}

# 1. Start the timer. A restart does not give the machine more time.
began=$(date +%s)
[ -s "$ROOT/began" ] && read -r began <"$ROOT/began"
left_s=$((began + END_WITHIN_S - $(date +%s)))
[ "$left_s" -ge 0 ] && [ "$left_s" -le "$END_WITHIN_S" ] || left_s=0
now
END_AT=$((NOW + left_s))
timer $((NOW - GRACE_S)) &
timer=$!

mkdir -p "$WORK" "$ROOT/cache" "$ROOT/sshd" && touch "$ROOT/boot.log"
known=$(stat -c %s "$ROOT/boot.log")
tail -c "+$((known + 1))" -F "$ROOT/boot.log" 2>/dev/null &
[ -s "$ROOT/began" ] || echo "$began" >"$ROOT/began"

# 2. If this script ran before, end billing: the run is over, or its secrets in memory are lost.
[ -e "$ROOT/ended" ] && end_billing "billing was ended before, and the machine was started again"
[ -e "$ROOT/started" ] && end_billing "the agent was started here before; this is a restart"
[ -n "$BEGIN_BY" ] && [ "$(date +%s)" -gt "$BEGIN_BY" ] && end_billing "this is long after the launch, so a restart"

# Restarts the timer if it was killed.
watch_timer() {
  kill -0 $timer 2>/dev/null && return
  now
  timer "$NOW" &
  timer=$!
  say "the timer had died and was restarted"
}

# Waits until homing reads the log and destroys the machine, or the timer ends billing.
stuck() { say "cannot go on: $*"; while :; do watch_timer; sleep "$LOOK_S"; done; }

# PREPARE
# 3. Set up SSH: allow our login key, and present the host key that homing has pinned.
own_sshd() {
  if ! command -v sshd >/dev/null; then
    say "the image has no sshd; installing it"
    { timeout 300 apt-get update -qq && timeout 300 apt-get install -y -qq --no-install-recommends openssh-server; } \
      >>"$ROOT/boot.log" 2>&1
  fi
  command -v sshd >/dev/null || stuck "there is no sshd in this image, and it could not be installed"
  printf '%s\n' "$LOGIN_KEY" >"$ROOT/sshd/authorized_keys"
  printf '%s' "$HOST_KEY" >"$ROOT/sshd/host_key"
  cat >"$ROOT/sshd/sshd_config" <<CONFIG
Port 22
HostKey $ROOT/sshd/host_key
AuthorizedKeysFile $ROOT/sshd/authorized_keys
PidFile $ROOT/sshd/pid
SetEnv "PATH=$PATH"
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
Subsystem sftp internal-sftp
CONFIG
  mkdir -p /run/sshd
  while :; do "$(command -v sshd)" -D -f "$ROOT/sshd/sshd_config" -E "$ROOT/sshd/log"; sleep 2; done &
}

system_sshd() {
  local home
  for home in /root /home/*; do
    [ -d "$home" ] || continue
    mkdir -p "$home/.ssh"
    grep -qsxF "$LOGIN_KEY" "$home/.ssh/authorized_keys" || printf '\n%s\n' "$LOGIN_KEY" >>"$home/.ssh/authorized_keys"
    chown --reference="$home" "$home/.ssh" "$home/.ssh/authorized_keys"
  done
  printf '%s' "$HOST_KEY" >/etc/ssh/ssh_host_ed25519_key
  printf '%s\n' "$HOST_KEY_PUB" >/etc/ssh/ssh_host_ed25519_key.pub
  # After a reboot, our processes and the secrets in memory are gone, so only end billing.
  if cd /var/lib/cloud/scripts/per-boot; then
    printf '#!/bin/bash\nwhile :; do\n%s\nsleep 60\ndone\n' "$END" >homing && chmod 700 homing
    cd /
  fi
  # An sshd that is not running yet reads the key when it starts.
  systemctl reload ssh || systemctl reload sshd || kill -HUP "$(cat /run/sshd.pid)" || say "sshd is not running yet"
} 2>/dev/null

if [ "$KIND" = container ]; then own_sshd; else system_sshd; fi

# 4. Get the files to run: homing delivers them, or this machine fetches them.
get() { curl -fsSL --retry 3 --max-time 600 -o "$2" "$1" || python3 -I -c 'import sys, urllib.request as u
u.urlretrieve(*sys.argv[1:])' "$1" "$2"; }

# The hashes are in this script. No file from a store is used before its hash is checked.
sha256_of() { sha256sum "$1" || python3 -I -c 'import hashlib, sys
print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$1"; } 2>/dev/null

if [ ${#FETCH[@]} -gt 0 ]; then
  for ((i = 0; i < ${#FETCH[@]}; i += 3)); do
    name=${FETCH[i + 1]} file=$WORK/${FETCH[i + 1]} wrong=0
    mkdir -p "$(dirname "$file")"
    while :; do
      if get "${FETCH[i]}" "$file.part" 2>>"$ROOT/boot.log" && found=$(sha256_of "$file.part"); then
        [ "${found%% *}" = "${FETCH[i + 2]}" ] && mv "$file.part" "$file" && break
        rm -f "$file.part"
        [ $((wrong += 1)) -ge 3 ] && stuck "$name in the store was replaced: its sha256 is ${found%% *}"
      fi
      say "$name could not be fetched; trying again"
      sleep 5
    done
  done
else
  : >"$ROOT/ready"
  say "ready; waiting for the hand-over"
  until [ -e "$WORK/go" ]; do watch_timer; sleep 0.5; done
fi

# 5. Start the agent. The secrets are only in its environment.
agent() {
  local secrets=
  if [ -e "$SHM/secrets" ]; then
    IFS= read -r -d '' secrets <"$SHM/secrets"
    rm -rf "$SHM"
  fi
  eval "$secrets"
  cd "$WORK" && exec python3 -I "$WORK/agent.zip" "$WORK/$BOOT"
}

# A stopped container signals only this script, but it is the agent that can still save its work.
tell_agent() {
  local file
  for file in /proc/[0-9]*/cmdline; do
    case "$(tr '\0' ' ' <"$file" 2>/dev/null)" in
      *"agent.zip $WORK/$BOOT "*) kill -TERM "$(basename "$(dirname "$file")")" ;;
    esac
  done
}

: >"$ROOT/started"
sync "$ROOT/started"
say "starting the agent"
agent >>"$ROOT/boot.log" 2>&1 &
pid=$!
trap tell_agent TERM INT
# Never exit, because the container would be restarted. The agent or the dead-man ends billing.
while :; do
  watch_timer
  if [ -n "$pid" ] && ! kill -0 "$pid" 2>/dev/null; then
    wait "$pid"
    say "the agent ended with exit code $?"
    pid=
  fi
  sleep "$LOOK_S" & wait $!
done
