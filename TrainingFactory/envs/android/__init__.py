"""Android devices as environments, over adb. See docs/ANDROID.md."""
