#!/usr/bin/env bash
# Tries the containers for real: builds the image, runs a federation, kills a node in the middle of a round, compares
# what comes out with a run in which nothing happened; then the same with TLS and node keys. Five minutes on two cores.
#   docker/smoke.sh
# Needs Docker with compose and nothing else. It uses names, ports and folders of its own and removes them at the end;
# the image stays. BASE_IMAGE and PIP_EXTRA_INDEX_URL are respected, see Dockerfile.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/floret-smoke.XXXXXX")
user=$(id -u):$(id -g)
[[ $user != 0:* ]] || user=1000:1000

unset COMPOSE_FILE COMPOSE_PROFILES
export COMPOSE_PROJECT_NAME=floret-smoke-$$ FLORET_USER=${FLORET_USER:-$user} FLORET_BIND=127.0.0.1
export FLORET_RUNS=$work/runs FLORET_CERTIFICATES=$work/certificates
export FLORET_FLEET_PORT=${FLORET_FLEET_PORT:-19092}
files=(-f "$here/compose.yaml")
compose() { docker compose "${files[@]}" "$@"; }
quietly() { "$@" >"$work/last.log" 2>&1; }

finish() {
  code=$?
  trap - EXIT INT TERM
  if [[ $code != 0 ]]; then
    compose logs --no-color --tail 30 2>&1 || true
  fi
  compose --profile cli down --volumes --remove-orphans --timeout 5 >/dev/null 2>&1 || true
  # What the containers wrote may belong to another user.
  docker run --rm --user 0:0 --volume "$work:/mounted" --entrypoint sh "${FLORET_IMAGE:-floret}" \
    -c 'rm -rf /mounted/runs /mounted/certificates' >/dev/null 2>&1 || true
  rm -rf "$work"
  exit "$code"
}
trap finish EXIT
trap 'exit 130' INT TERM

ok() { printf 'ok    %4ss  %s\n' "$SECONDS" "$1"; }
fail() {
  printf 'FAIL  %4ss  %s\n' "$SECONDS" "$1" >&2
  [[ ! -s $work/last.log ]] || tail -n 30 "$work/last.log" >&2
  exit 1
}
# check WHAT COMMAND...: the command succeeds.
check() {
  local what=$1
  shift
  if quietly "$@"; then ok "$what"; else fail "$what"; fi
}
# refused WHAT TEXT COMMAND...: the command fails and says TEXT.
refused() {
  local what=$1 text=$2
  shift 2
  if quietly "$@"; then fail "$what"; fi
  if grep -q -- "$text" "$work/last.log"; then ok "$what"; else fail "$what (but not with: $text)"; fi
}
# eventually SECONDS WHAT COMMAND...: the command succeeds within that time, tried again and again.
eventually() {
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until quietly "$@"; do
    [[ $SECONDS -lt $end ]] || fail "$what"
    sleep 0.3
  done
  ok "$what"
}
# within SECONDS COMMAND...: runs it, and stops it when time is up.
within() {
  local end=$((SECONDS + $1)) pid
  shift
  "$@" &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    if [[ $SECONDS -ge $end ]]; then
      kill "$pid" 2>/dev/null || true
      wait "$pid" || true
      echo "no end in sight"
      return 124
    fi
    sleep 0.3
  done
  wait "$pid"
}

healthy() {
  local name
  for name in "$@"; do
    [[ $(docker inspect --format '{{.State.Health.Status}}' "$COMPOSE_PROJECT_NAME-$name-1") == healthy ]] || return 1
  done
}
run() { within 300 compose run --rm --no-TTY run "$1"; }
online() { [[ $(compose run --rm --no-TTY cli flwr supernode list compose 2>/dev/null | grep -c online) == "$1" ]]; }
rounds_done() { cat "$work"/runs/*/history.jsonl 2>/dev/null | wc -l; }
# What node-1 is doing, by its log: the last message that it received or answered.
training() {
  compose logs --no-color --no-log-prefix --tail 20 node-1 2>&1 |
    grep -E 'Receiving: train|Answered: train' | tail -n 1 | grep -q Receiving
}
in_round() { [[ $(rounds_done) -ge $1 ]] && training; }
# The round of node-1's last state, and the first round of its run that left one.
state() {
  compose run --rm --no-TTY --no-deps --entrypoint python3 node-1 - 2>/dev/null <<'PYTHON'
import json, pathlib
last = json.loads(max(pathlib.Path("/floret/state").glob("*/fedper/node-1/*.json")).read_text())
print(last["round"], last["first"])
PYTHON
}
report_there() { [[ -s $(echo "$work"/runs/*/report.html) && -s $(echo "$work"/runs/*/summary.json) ]]; }

rounds=8
config="method=\"fedper\" min-clients=3 rounds=$rounds local-epochs=250 client-state=\"fresh\" round-timeout=150.0"

echo "Floret in containers, as user $FLORET_USER, in $work"
check "the image is built" compose build
check "the GPU overlay is valid" docker compose "${files[@]}" -f "$here/compose.gpu.yaml" config -q

# 1. A federation without TLS, and a node that is killed.
check "the federation starts" compose up --detach
eventually 180 "all five containers are healthy" healthy superlink executor node-0 node-1 node-2
check "a node runs as $FLORET_USER" compose exec -T node-0 sh -c "[ \$(id -u):\$(id -g) = $FLORET_USER ]"
refused "its root file system is read-only" "Read-only file system" compose exec -T node-0 touch /app/x
refused "it does not reach the ServerAppIo API" "refused" \
  compose exec -T node-0 bash -c 'exec 3<>/dev/tcp/superlink/9091'
refused "it does not reach the Control API" "refused" \
  compose exec -T node-0 bash -c 'exec 3<>/dev/tcp/superlink/9093'
refused "it does not know the Control API's name" "not known\|failure in name resolution" \
  compose exec -T node-0 bash -c 'exec 3<>/dev/tcp/control/9093'
control=$(compose exec -T superlink python3 -c 'import socket; print(socket.gethostbyname("control"))')
refused "it does not reach the Control API's address" "unreachable\|timed out\|no end in sight" \
  within 10 compose exec -T node-0 bash -c "exec 3<>/dev/tcp/$control/9093"
check "it is not published on the host" bash -c "! docker port $COMPOSE_PROJECT_NAME-superlink-1 | grep 9093"
check "it does reach the Fleet API" compose exec -T node-0 bash -c 'exec 3<>/dev/tcp/superlink/9092'

check "a run ends" run "$config"
check "its report is on the host" report_there
mkdir "$work/before"
mv "$work"/runs/* "$work/before/" 2>/dev/null || fail "the run directory belongs to $FLORET_USER"

run "$config" >"$work/disturbed.log" 2>&1 &
running=$!
eventually 120 "the same run again is in a round after the third" in_round 3
killed_at=$(($(rounds_done) + 1))
check "node-1 is killed in the middle of it" docker kill --signal KILL "$COMPOSE_PROJECT_NAME-node-1-1"
read -r round first < <(state) || fail "the state of node-1 can be read"
[[ $round -ge 3 && $round -le $killed_at && $first == 1 ]] || fail "the state of node-1 is of round 3 or later ($round)"
ok "its state on the volume is of round $round"
kill -0 "$running" 2>/dev/null || fail "the run waits for node-1"
check "node-1 is started again" compose start node-1
wait "$running" || { cp "$work/disturbed.log" "$work/last.log"; fail "the run goes on to its end"; }
ok "the run goes on to its end"
check "its report is on the host" report_there
read -r round first < <(state) || fail "the state of node-1 can be read"
[[ $round == "$rounds" && $first == 1 ]] || fail "the state of node-1 went on to round $rounds ($first to $round)"
ok "the state of node-1 went on: from round $first to round $round"
mv "$work"/runs/* "$work/after" || fail "the run directory belongs to $FLORET_USER"
mv "$work"/before/* "$work/runs/undisturbed"
mv "$work/after" "$work/runs/disturbed"
check "every client was in every round, and every figure is that of the undisturbed run" \
  compose run --rm --no-TTY --no-deps cli python3 -c '
import json
def read(name):
    lines = open(f"/floret/runs/{name}/history.jsonl").read().splitlines()
    kept = []
    for line in map(json.loads, lines):
        assert not line["refused"] and len(line["clients"]) == 3, line
        kept.append([(n, c["trained"], c["before"], c["after"], c["loss"]) for n, c in line["clients"].items()])
    return kept
assert read("disturbed") == read("undisturbed"), (read("disturbed"), read("undisturbed"))
'
docker run --rm --user 0:0 --volume "$work:/mounted" --entrypoint sh "${FLORET_IMAGE:-floret}" -c 'rm -rf /mounted/runs/*'
check "the federation is taken down" compose down --volumes --timeout 10

# 2. TLS and node keys.
files+=(-f "$here/compose.tls.yaml")
check "certificates and keys are made" compose run --rm --no-TTY certificates --host localhost --node stranger
check "the federation starts with TLS" compose up --detach
eventually 120 "SuperLink and executor are healthy" healthy superlink executor
eventually 120 "an unregistered node is turned away" \
  bash -c "docker logs $COMPOSE_PROJECT_NAME-node-0-1 2>&1 | grep 'does not know --key'"
check "no node is online" online 0
check "the keys of the three nodes are registered" "$here/register.sh" "$work"/certificates/nodes/node-?.pub
eventually 180 "all nodes are online" online 3
eventually 60 "they are healthy" healthy node-0 node-1 node-2
check "a run over TLS" run 'method="fedper" min-clients=3 rounds=2 local-epochs=1'
check "it ends with a report on the host" report_there
stranger() {
  within 90 compose run --rm --no-TTY --no-deps --volume "$work/certificates/nodes/stranger:/stranger:ro" \
    --entrypoint floret node-0 node --superlink=superlink:9092 --client-name=stranger --partition=0/3 --max-wait=20 "$@"
}
refused "a node with an unregistered key is turned away" "does not know --key" \
  stranger --root-certificates=/run/secrets/ca.crt --key=/stranger
refused "a node without a key is turned away" "accepts only nodes with a registered key" \
  stranger --root-certificates=/run/secrets/ca.crt
refused "a node without TLS is turned away" "wants TLS" stranger --insecure
refused "a node does not trust a certificate of another CA" "certificate is refused" stranger --key=/stranger
check "still three nodes are online" online 3
check "everything is taken down" compose --profile cli down --volumes --timeout 10
echo "all is well"
