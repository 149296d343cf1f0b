#!/bin/sh
# Keeps tieringd running in a container of its own: supervise.sh CONFIGURATION
#
# The container lives as long as its pod, whatever tieringd does. A container that ends, or a probe that fails, would
# make the pod unready and take the broker out of its services. So there is no probe: this script starts tieringd
# again when it ends, kills it when it hangs, and reloads it when its configuration changes.
set -u
config=$1
interval=${SUPERVISE_INTERVAL_SECONDS:-30}
rest=${SUPERVISE_REST_SECONDS:-10}
health=${SUPERVISE_HEALTH_URL:-http://127.0.0.1:9640/healthz}
silent_max=${SUPERVISE_SILENT_MAX:-10}
ask='import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)'
child=
stopping=

stop() {
    stopping=1
    [ -z "$child" ] || kill -TERM "$child"
}
trap stop TERM INT

# A shell runs a trap between two commands. So a long sleep runs in the background, and `wait` can be interrupted.
pause() {
    sleep "$1" &
    wait $!
}

watch() {
    trap - TERM INT
    # A start may take long: tieringd is expected to answer only after it has answered once.
    silent=
    before=$2
    while sleep "$interval"; do
        now=$(cksum <"$config")
        if [ "$now" != "$before" ]; then
            before=$now
            kill -HUP "$1"
        fi
        if python3 -c "$ask" "$health" 2>/dev/null; then
            [ -n "$silent" ] || echo "supervise: tieringd answers"
            silent=0
        elif [ -n "$silent" ]; then
            silent=$((silent + 1))
        fi
        if [ "${silent:-0}" -ge "$silent_max" ]; then
            echo "supervise: $silent_max times no answer from $health; tieringd is killed and started again" >&2
            kill -KILL "$1"
            return
        fi
    done
}

# A sidecar starts before its broker, which makes its log directory. Before that there is nothing to pin to.
while [ -z "$stopping" ] && [ ! -e "${SUPERVISE_WAIT_FOR:-/}" ]; do pause 1; done

while [ -z "$stopping" ]; do
    # The checksum is taken before tieringd reads the file, so the watcher sees every later change.
    before=$(cksum <"$config")
    # A signal that came meanwhile has reached no child.
    [ -z "$stopping" ] || break
    tieringd run --config "$config" &
    child=$!
    watch "$child" "$before" &
    watcher=$!
    wait "$child"
    code=$?
    # A signal ends the wait but not tieringd, which first finishes its uploads.
    while kill -0 "$child" 2>/dev/null; do
        wait "$child"
        code=$?
    done
    child=
    kill "$watcher" 2>/dev/null
    if [ -z "$stopping" ]; then
        echo "supervise: tieringd ended with $code; it is started again in $rest seconds" >&2
        pause "$rest"
    fi
done
