#!/usr/bin/env bash
# Registers the public keys of nodes with the SuperLink that runs from compose.yaml and compose.tls.yaml:
#   docker/register.sh certificates/nodes/*.pub
# A key that is registered already is left as it is.
set -euo pipefail
[[ $# -gt 0 ]] || { echo "usage: docker/register.sh KEY.pub ..." >&2; exit 2; }
docker_folder=$(dirname "$0")

for key in "$@"; do
  [[ -r $key ]] || { echo "$key: cannot be read" >&2; exit 1; }
  if said=$(docker compose -f "$docker_folder/compose.yaml" -f "$docker_folder/compose.tls.yaml" \
    run --rm --no-TTY cli sh -c 'cat > /tmp/key.pub && flwr supernode register /tmp/key.pub compose' <"$key" 2>&1); then
    echo "$key: registered"
  # Flower's words; Docker says of an address, too, that it is already in use.
  elif grep -qF "The provided public key is already in use" <<<"$said"; then
    echo "$key: was registered before"
  else
    echo "$said" >&2
    echo "$key: not registered" >&2
    exit 1
  fi
done
