"""The system calls that sandboxed code may make: name, number on x86_64, number on aarch64 (-: does not exist). All
others are rejected, including those of future kernels."""

from __future__ import annotations

# By paragraph: files by descriptor and by name (Landlock decides which), waiting, the two ends of a socketpair,
# memory, the process itself and the clock, its own signals.
ALLOWED_CALLS = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69
pwritev 296 70, preadv2 327 286, pwritev2 328 287, close 3 57, close_range 436 436, lseek 8 62
stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48
faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents 78 -, getdents64 217 61, getcwd 79 17
chdir 80 49, fchdir 81 50, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35
rename 82 -, renameat 264 38, renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -
symlinkat 266 36, ftruncate 77 46, fallocate 285 47, fsync 74 82, fdatasync 75 83
sync_file_range 277 84, fadvise64 221 223, copy_file_range 326 285, sendfile 40 71, splice 275 76
tee 276 77, umask 95 166, statfs 137 43, fstatfs 138 44, flock 73 32, dup 32 23, dup2 33 -
dup3 292 24, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12
flistxattr 196 13

pipe 22 -, pipe2 293 59, eventfd 284 -, eventfd2 290 19, poll 7 -, ppoll 271 73, select 23 -
pselect6 270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -
epoll_pwait 281 22, epoll_pwait2 441 441, timerfd_create 283 85, timerfd_settime 286 86
timerfd_gettime 287 87, clock_nanosleep 230 115, nanosleep 35 101, pause 34 -

sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, shutdown 48 210, getsockopt 55 209
setsockopt 54 208, getsockname 51 204, getpeername 52 205

mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, madvise 28 233, brk 12 214, mincore 27 232
msync 26 227, membarrier 324 283, futex 202 98, futex_waitv 449 449, set_robust_list 273 99
get_robust_list 274 100, rseq 334 293, set_tid_address 218 96, sched_yield 24 124
sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120
sched_get_priority_max 146 125, sched_get_priority_min 147 126, getcpu 309 168, get_mempolicy 239 236
arch_prctl 158 -

gettid 186 178, getpid 39 172, getppid 110 173, getpgrp 111 -, getpgid 121 155, getsid 124 156
getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150
getgroups 115 158, uname 63 160, sysinfo 99 179, times 100 153, getrusage 98 165, getrlimit 97 163
setrlimit 160 164, getpriority 140 141, clock_gettime 228 113, clock_getres 229 114
gettimeofday 96 169, time 201 -, alarm 37 -, getitimer 36 102, setitimer 38 103, getrandom 318 278
wait4 61 260, waitid 247 95, exit 60 93, exit_group 231 94, restart_syscall 219 128

rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136
rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, signalfd 282 -, signalfd4 289 74
"""

# Landlock does not control modes, owners and times of files, so these calls do nothing but report success:
# copying a file in Python changes its mode and should not fail because of that.
PRETENDED_CALLS = """
chmod 90 -, fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54
utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6
fsetxattr 190 7
"""

# Allowed only with certain arguments; confine.py has the rules.
CONDITIONAL_CALLS = """
open 2 -, openat 257 56, fcntl 72 25, ioctl 16 29, socketpair 53 199, kill 62 129, tgkill 234 131
prlimit64 302 261, clone 56 220, clone3 435 435
"""

ARCHITECTURES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column, AUDIT_ARCH


def parse_call_numbers(table: str, machine: str) -> dict[str, int]:
    column, _ = ARCHITECTURES[machine]
    rows = [row_text.split() for row_text in table.replace("\n", ",").split(",") if row_text.strip()]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}
