#!/bin/sh
# Starts one of several Valkeys, or the Sentinel beside it: valkey.sh server|sentinel FLAG…. Either asks the Sentinels of
# the other pods which pod is the primary. Where none answers, the first pod is. SELF and PEERS are names of pods.
set -eu
kind=$1
shift
umask 077

primary() {  # prints the primary's name; nothing where no other Sentinel answers
  for peer in $PEERS; do
    [ "$peer" != "$SELF" ] || continue
    found=$(REDISCLI_AUTH=$(cat /access/sentinel-password) timeout 2 valkey-cli -h "$peer" -p 26379 SENTINEL GET-MASTER-ADDR-BY-NAME headwater 2>/dev/null | head -n 1) || continue
    case " $PEERS " in *" $found "*) echo "$found"; return ;; esac
  done
}

found=$(primary)
if [ "$kind" = server ]; then
  # The others take this one for the primary, whose data are gone: they would copy nothing over what they have. While it
  # does not answer they choose another; where they cannot, they have nothing either.
  tries=0
  while [ "$found" = "$SELF" ] && [ "$tries" -lt 30 ]; do
    sleep 2
    tries=$((tries + 1))
    found=$(primary)
  done
fi
[ -n "$found" ] || found=${PEERS%% *}

if [ "$kind" = server ]; then
  cat /access/server.conf >/data/valkey.conf
  echo "replica-announce-ip $SELF" >>/data/valkey.conf
  [ "$found" = "$SELF" ] || echo "replicaof $found 6379" >>/data/valkey.conf
  exec valkey-server /data/valkey.conf "$@"
fi
# What a Sentinel learns is in its file, which outlives the container and not the pod.
if [ ! -e /data/sentinel.conf ]; then
  sed "s/SELF/$SELF/; s/PRIMARY/$found/" /access/sentinel.conf >/data/new.conf
  mv /data/new.conf /data/sentinel.conf
fi
exec valkey-server /data/sentinel.conf --sentinel "$@"
