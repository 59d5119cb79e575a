#!/usr/bin/env bash
# A private PostgreSQL server for the tests.
#   install      puts the program in place with apt, where it is missing and we may
#   start DIR    makes a server in the new directory DIR, reachable by socket only; prints its URL
#   stop DIR     ends it and removes DIR
# Status 3: there is no PostgreSQL on this machine.
set -euo pipefail

find_tool() {
    command -v "$1" 2>/dev/null ||
        { compgen -G "/usr/lib/postgresql/*/bin/$1" || true; } | sort -V | tail -n 1
}

# The server refuses to run as root.
unprivileged() {
    if [ "$(id -u)" -ne 0 ]; then "$@"; else runuser -u postgres -- "$@"; fi
}

install() {
    [ -z "$(find_tool initdb)" ] || return 0
    local root=()
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null && sudo -n true 2>/dev/null || return 3
        root=(sudo -n)
    fi
    command -v apt-get >/dev/null || return 3
    "${root[@]}" apt-get update -qq >&2 || return 3
    DEBIAN_FRONTEND=noninteractive "${root[@]}" \
        apt-get install -y -qq --no-install-recommends postgresql >&2 || return 3
}

start() {
    local directory=$1 initdb pg_ctl
    initdb=$(find_tool initdb) pg_ctl=$(find_tool pg_ctl)
    [ -n "$initdb" ] && [ -n "$pg_ctl" ] || return 3
    mkdir "$directory"
    [ "$(id -u)" -ne 0 ] || chown postgres "$directory"
    cd "$directory"
    unprivileged "$initdb" -D "$directory/data" -U tandem --auth=trust -E UTF8 --no-sync \
        >"$directory.log" 2>&1
    unprivileged "$pg_ctl" -D "$directory/data" -l "$directory/log" -w \
        -o "-c listen_addresses='' -c unix_socket_directories='$directory' -c fsync=off" start \
        >>"$directory.log" 2>&1 </dev/null
    echo "postgresql+psycopg://tandem@/postgres?host=$directory"
}

stop() {
    local directory=$1
    unprivileged "$(find_tool pg_ctl)" -D "$directory/data" -m immediate stop >/dev/null
    rm -rf "$directory" "$directory.log"
}

"$@"
