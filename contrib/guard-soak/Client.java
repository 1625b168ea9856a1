import java.io.*;
import java.net.*;
import java.util.*;

/** As client.py, in Java: java Client.java RECORD HOST PORT. */
class Client {
    static final double TICK = 0.05, RENEWED = 0.01;
    static final int BURST = 25;
    static volatile int target;

    public static void main(String[] arguments) throws Exception {
        Writer record = new FileWriter(arguments[0], true);
        SocketAddress address = new InetSocketAddress(arguments[1], Integer.parseInt(arguments[2]));
        Thread reader = new Thread(() -> {
            try (BufferedReader lines = new BufferedReader(new InputStreamReader(System.in))) {
                for (String line; (line = lines.readLine()) != null; ) target = Integer.parseInt(line.trim());
            } catch (IOException error) { }
            System.exit(0);
        });
        reader.start();
        ArrayDeque<Socket> held = new ArrayDeque<>();
        StringJoiner times = new StringJoiner(",");
        TreeMap<String, Integer> failures = new TreeMap<>();
        double owed = 0;
        long said = System.nanoTime();
        while (true) {
            owed = Math.min(owed + held.size() * RENEWED * TICK, BURST);
            int surplus = Math.max(held.size() - target, 0) + (int) owed;
            owed -= (int) owed;
            for (int waiting = held.size(); surplus > 0 && waiting > 0; waiting--) {
                Socket client = held.poll();
                byte[] answer = new byte[4096];
                try {
                    if (client.getInputStream().available() == 0) {
                        held.add(client);
                        continue;
                    }
                    int length = client.getInputStream().read(answer);
                    if (!new String(answer, 0, Math.max(length, 0)).startsWith("HTTP/1.1 200")) failures.merge("wrong answer", 1, Integer::sum);
                } catch (IOException error) {
                    failures.merge(error.getMessage(), 1, Integer::sum);
                }
                client.close();
                surplus--;
            }
            for (int number = Math.min(target - held.size(), BURST); number > 0; number--) {
                Socket client = new Socket();
                long began = System.nanoTime();
                try {
                    client.connect(address);
                    times.add(Long.toString((System.nanoTime() - began) / 1000));
                    client.getOutputStream().write("GET / HTTP/1.1\r\nHost: soak\r\n\r\n".getBytes());
                    held.add(client);
                } catch (IOException error) {
                    client.close();
                    String message = String.valueOf(error.getMessage());
                    failures.merge(message.contains("Cannot assign requested address") ? "EADDRNOTAVAIL" : message, 1, Integer::sum);
                }
            }
            if (System.nanoTime() >= said + 1_000_000_000L) {
                said += 1_000_000_000L;
                StringJoiner failed = new StringJoiner(",");
                failures.forEach((kind, number) -> failed.add("\"" + kind.replace("\"", "'") + "\":" + number));
                record.write("{\"us\":[" + times + "],\"fail\":{" + failed + "},\"held\":" + held.size() + "}\n");
                record.flush();
                times = new StringJoiner(",");
                failures.clear();
            }
            Thread.sleep((long) (TICK * 1000));
        }
    }
}
