/// todo
pub fn calibrate() {}
