#!/bin/sh
# Finds or installs Android's adb for the tests: FOLDER/adb starts it. Nothing needs root, and nothing is installed into
# the system. Status 1, with a reason, where there is none for this machine.
#   tests/servers/adb.sh FOLDER
set -u
mkdir -p "$1" && cd "$1" || exit 1
here=$(pwd)

# starts COMMAND [LIBRARY_FOLDERS]: write FOLDER/adb, and see whether it runs.
starts() {
    libraries=${2:+env LD_LIBRARY_PATH=$2}
    printf '#!/bin/sh\nexec %s "%s" "$@"\n' "$libraries" "$1" > adb && chmod +x adb
    ./adb version >/dev/null 2>&1 || { rm -f adb; return 1; }
    echo "tests of Android use $(./adb version | sed -n 2p) ($1)"
    exit 0
}

# npm's package has Google's build, for x86-64 only.
if [ "$(uname -sm)" = "Linux x86_64" ] && command -v npm >/dev/null; then
    npm install --prefix . --no-audit --no-fund --ignore-scripts --loglevel=error --fetch-retries=1 \
        @binkit/android-platform-tools-linux-x64@0.35.1 >/dev/null 2>&1
    program=$here/node_modules/@binkit/android-platform-tools-linux-x64/vendor/adb
    [ -x "$program" ] && starts "$program"
fi

program=$(command -v adb) && starts "$program"

# The distribution's own, unpacked here with the libraries that this system has not.
if command -v apt-get >/dev/null && command -v dpkg >/dev/null; then
    mkdir -p apt/lists/partial apt/cache/archives/partial
    apt() {
        apt-get -qq -o Debug::NoLocking=1 -o Dir::State::Lists="$here/apt/lists" -o Dir::Cache="$here/apt/cache" \
            -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o APT::Sandbox::User=root "$@" >/dev/null 2>&1
    }
    apt update && apt install --yes --download-only --no-install-recommends adb &&
        for package in apt/cache/archives/*.deb; do dpkg -x "$package" debian || break; done
    rm -rf apt debian/usr/share
    libraries=$(find debian -name '*.so*' -exec dirname {} \; 2>/dev/null | sort -u | sed "s|^|$here/|" | paste -sd: -)
    program=$(find "$here/debian" -path '*platform-tools/adb' -type f 2>/dev/null)
    [ -x "$program" ] && starts "$program" "$libraries"
fi
echo "no adb for $(uname -sm) was found or could be installed: tests of Android will skip"
exit 1
